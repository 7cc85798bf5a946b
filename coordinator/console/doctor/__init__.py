"""`run doctor`: is this directory, this node, this network fit for a run?"""
