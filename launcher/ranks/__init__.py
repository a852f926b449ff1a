"""Groups whose members have several ranks: one runtime for each rank, one order of the network."""
