"""Starting, stopping and watching the roles."""
