"""C code that is compiled when first used: the compiler's driver, and vector arithmetic that the kernels share."""
