"""The HTML report of a comparison: one file, readable offline, on a phone, in print, in light and in dark."""

from sparsebp_cli.compare.report.page import REPORT_CURVES, render_report, write_report

__all__ = ["REPORT_CURVES", "render_report", "write_report"]
