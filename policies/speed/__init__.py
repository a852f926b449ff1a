"""How fast each member of a group progresses: speed models behind one interface."""
