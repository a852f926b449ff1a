"""The base of all policies, those that rank the queue alone, and Muri's own, AntMan and Pollux."""
