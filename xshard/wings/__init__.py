"""What a run may have and may lack: each folder is a wing, `xshard.hooks.Wing`.

`xshard.wings.installed` names those of this installation. A wing is left out by
deleting its lines there, and its folder.
"""
