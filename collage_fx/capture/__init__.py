"""From a call of ``step`` to an accepted graph whose inputs have names, in families of equal updates."""
