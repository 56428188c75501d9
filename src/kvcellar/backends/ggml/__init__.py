"""The ggml backend: libggml through ctypes, GGUF files, graphs kept by shape."""
