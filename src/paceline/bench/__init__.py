"""The load generator: what to send, when to send it, what came back and what that means (DESIGN section 5)."""
