"""MindSpeed-LLM: launch scripts of its pretrain_gpt.py, as Megatron-LM's with flags of their own."""
