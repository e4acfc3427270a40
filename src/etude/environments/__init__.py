"""The environments service: pods over HTTP. Code under test runs in a pod, never in a service's process."""
