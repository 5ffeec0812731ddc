"""Features that stand on the doors of the core alone, a file each: nothing in the core knows them."""
