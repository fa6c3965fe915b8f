"""llama.cpp's file format, both ways: one file that holds settings, tokenizer and tensors."""
