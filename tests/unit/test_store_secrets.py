"""Credentials do not get out."""

from __future__ import annotations

from elastictrain.checkpoint.secrets import Redactor, redact_options, redact_url

OPTIONS = {
    "key": "AKIA123",
    "secret": "s3cr3t/with+signs",
    "anon": False,
    "endpoint_url": "http://bob:hunter2@localhost:9000",
    "client_kwargs": {"region_name": "eu-1", "aws_session_token": "tok-en"},
    "account": {"credentials": ["c1-long", "c2-long"]},
    "retries": 3,
}


def test_options_are_shown_without_secrets():
    assert redact_options(OPTIONS) == {
        "key": "***",
        "secret": "***",
        "anon": False,
        "endpoint_url": "http://***@localhost:9000",
        "client_kwargs": {"region_name": "eu-1", "aws_session_token": "***"},
        "account": {"credentials": ["***", "***"]},
        "retries": 3,
    }


def test_urls_are_shown_without_user_and_query_values():
    assert redact_url("s3://key:secret@host/bucket/x") == "s3://***@host/bucket/x"
    assert redact_url("https://h/c?sig=abc&se=2026") == "https://h/c?sig=***&se=***"
    assert redact_url("s3://bucket/prefix") == "s3://bucket/prefix"


def test_the_text_of_an_error_loses_what_the_store_was_given():
    redact = Redactor("sftp://me:pa55word@host/x?sig=zzz9", OPTIONS)
    text = redact("bad AKIA123 s3cr3t/with+signs tok-en c2-long pa55word zzz9 at eu-1")
    assert text == "bad *** *** *** *** *** *** at eu-1"
