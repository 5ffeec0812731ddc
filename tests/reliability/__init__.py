"""The soak test: runs that are saved, killed, loaded elsewhere and gone on with, against those that are not.

``./dev soak`` takes thousands of drawn cases and writes ``docs/reliability.md``; the tests take a hundred.
"""
