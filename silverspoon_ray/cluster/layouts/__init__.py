"""How one replica of the teacher lies over several devices."""
