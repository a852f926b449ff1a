"""What people and the controller see of a running group: rates, traces, `muri top`, `muri timeline`."""
