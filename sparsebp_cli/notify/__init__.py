"""Tells the user, by a command or a webhook, what became of a run. Off unless ``settings.yaml`` asks for it."""

from sparsebp_cli.notify.event import Event, tell, tell_end
from sparsebp_cli.notify.settings import Notice, Secret, Settings, load_settings, settings_file

__all__ = ["Event", "Notice", "Secret", "Settings", "load_settings", "settings_file", "tell", "tell_end"]
