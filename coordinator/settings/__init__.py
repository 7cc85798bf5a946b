"""The settings of a run: their classes, and how they are built from what was typed.

To read: `tree` (RunSettings), `fields` and the classes of its sections (`cluster`, `keeping`, `metrics`,
`groups`), `loading` (from options, file and names), `agreement` (what is refused); `suggestions` for typos.
"""
