"""Several simulations: carried out here or on a cluster, and summed up in figures."""
