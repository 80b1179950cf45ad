"""The service itself: configuration, Ray Serve deployments, sequencing and the command line."""
