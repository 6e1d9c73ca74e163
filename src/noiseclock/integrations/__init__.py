"""A Clock in third-party trainers and tools. Each module needs its own package and is imported only on request."""
