"""Where prompts come from: sources of examples, tokenizers, and the resumable stream of prompts."""
