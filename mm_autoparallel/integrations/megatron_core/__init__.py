"""Megatron-LM's pretrain_gpt.py on megatron-core: a plan as its flags, and its launch scripts as a job and a plan."""
