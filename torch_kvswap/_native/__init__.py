"""The native library, what it is called with, and its checks."""
