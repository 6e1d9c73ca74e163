"""A Clock in other people's trainers and tools. Each module needs its own package, and none is imported unless asked for."""
