"""The default model: a cluster in time, driven event by event by the policy that is simulated."""
