"""Does a reward at the end of a chain of windows teach its summaries?"""
