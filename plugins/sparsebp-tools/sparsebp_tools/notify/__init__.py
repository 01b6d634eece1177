"""Notify the user of runs by a command; off unless ``settings.yaml`` requests it."""

from sparsebp_cli.notify import settings_file
from sparsebp_tools.notify.check import check
from sparsebp_tools.notify.event import Event, tell, tell_end
from sparsebp_tools.notify.settings import Notice, Settings, load_settings

__all__ = ["Event", "Notice", "Settings", "check", "load_settings", "settings_file", "tell", "tell_end"]
