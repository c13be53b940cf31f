"""What flows: the batch type, datasets and loaders, the one file that shifts tokens, and how a step's rows are cut."""
