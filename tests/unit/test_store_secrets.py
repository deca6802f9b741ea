"""Credentials do not get out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://u:p@ssword@host/x", "sftp://***@host/x"),
        ("sftp://u@corp:p@ss/w@rd@host/x", "sftp://***@host/x"),
        ("s3://AK:ab/cd@host/x", "s3://***@host/x"),
        ("s3://AK:ab/cd@42", "s3://***@42"),
        ("s3://AK:ab/c?d=e@host/x", "s3://***@host/x"),
        ("s3://token@host/path@v2", "s3://***@host/path@v2"),
        ("s3://AK:cd@host/path@7: there is none", "s3://***@host/path@7: there is none"),
        ("from s3://a:b/c@d/x to s3://e:f/g@h/y", "from s3://***@d/x to s3://***@h/y"),
        ("s3://bucket/path@v2", "s3://bucket/path@v2"),
        ("s3://bucket/a:b@v2", "s3://bucket/a:b@v2"),
        ("http://localhost:9000/bucket", "http://localhost:9000/bucket"),
        ("s3://bucket/x, mail me@home", "s3://bucket/x, mail me@home"),
    ],
)
def test_a_secret_may_hold_at_signs_and_slashes(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_a_client_that_cuts_a_secret_at_a_slash_says_no_half_of_it() -> None:
    redact = Redactor("s3://AKEY:hunter2/very@secret@bucket/p", {})
    text = 'Invalid bucket name "AKEY:hunter2"; key "very@secret@bucket/p"'
    assert redact(text) == 'Invalid bucket name "***:***"; key "***@***@bucket/p"'
    assert Redactor("sftp://me:a%2Fb%40c@host/x", {})("no login with a/b@c") == "no login with ***"


VISIBLE = st.characters(min_codepoint=33, max_codepoint=126)
NAMES = st.text("abcdefghij-.", min_size=1, max_size=12)


@given(user=NAMES, password=st.text(VISIBLE, min_size=3, max_size=30), host=NAMES, path=NAMES, step=st.booleans())
def test_nothing_between_the_scheme_and_the_host_is_shown(
    user: str, password: str, host: str, path: str, step: bool
) -> None:
    """Whatever the password, also where it is not encoded as it should be; what follows it stays."""
    rest = f"host{host}/{path}" + ("@7" if step else "")
    url = f"sftp://{user}:{password}@{rest}"
    assert redact_url(f"cannot open {url}: refused") == f"cannot open sftp://***@{rest}: refused"
    assert Redactor(url, {})(f"bad {password} of") == "bad *** of"
    if not set(password) & set(":/@"):  # no colon: a token, or a user alone
        assert redact_url(f"sftp://{password}@{rest}") == f"sftp://***@{rest}"


@given(bucket=NAMES, path=st.text(VISIBLE.filter(lambda c: c not in "?&"), max_size=30))
def test_a_url_without_a_colon_or_an_at_sign_before_the_path_is_shown(bucket: str, path: str) -> None:
    url = f"s3://{bucket}/{path.replace('://', '')}"
    assert redact_url(url) == url
