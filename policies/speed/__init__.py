"""How fast each member of a group gets on: speed models behind one interface."""
