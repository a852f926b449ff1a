"""What is measured of a script and shown of a group: its clock, dry runs, traces, `muri top`, `muri timeline`."""
