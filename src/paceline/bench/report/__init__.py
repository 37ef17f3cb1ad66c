"""What a run says: summary files, the terminal's table, progress."""
