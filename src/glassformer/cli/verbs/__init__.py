"""The verbs, a file each: options, help, what it prints; torch is imported when a verb runs."""
