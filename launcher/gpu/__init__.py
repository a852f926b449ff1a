"""One GPU shared by the members of one process: streams, memory, and errors that end its context."""
