"""What each verb does, in a module of the same name."""
