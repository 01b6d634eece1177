"""Tells the user, by a command or a webhook, what became of a run. Off unless ``settings.yaml`` asks for it."""

from sparsebp_cli.notify import settings_file
from sparsebp_tools.notify.check import check
from sparsebp_tools.notify.event import Event, tell, tell_end
from sparsebp_tools.notify.settings import Notice, Secret, Settings, load_settings

__all__ = ["Event", "Notice", "Secret", "Settings", "check", "load_settings", "settings_file", "tell", "tell_end"]
