"""The lab: what explores, compares and proves Muri. It imports the core, which never imports it."""
