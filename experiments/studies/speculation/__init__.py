"""How many tokens a pass do drafts give on the main job's own episodes?"""
