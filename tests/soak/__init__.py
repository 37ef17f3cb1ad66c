"""Hours of bad days in minutes: random traffic against a server with too little of everything (make soak)."""
