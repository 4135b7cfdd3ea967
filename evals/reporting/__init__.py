"""From rows to tables, figures and pages."""
