"""Does Muon train a small MoE on code better than AdamW, and at what cost?"""
