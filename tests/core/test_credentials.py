"""Texts in which URLs have credentials: what is shown of them tells where something lies, and no secret."""

import pytest

from batchgen.core.errors import BatchgenError, InputError, TooManyFailed, one_line
from batchgen.core.text import without_credentials

SHOWN = [
    ("s3://AKIA:abc/de+f@bucket/x.parquet", "s3://***@bucket/x.parquet"),
    ("s3://key:se@cret@bucket/x", "s3://***@bucket/x"),
    ("redis://:secret@host/0", "redis://***@host/0"),
    ("https://ghp_secret@github.com/x", "https://***@github.com/x"),
    ("https://host/a?X-Amz-Signature=secret&token=secret2#x", "https://host/a?X-Amz-Signature=***&token=***#x"),
    ("https://u:p@h:8080/a?sv=1&sig=s%2Fecret and more", "https://***@h:8080/a?sv=***&sig=*** and more"),
    ("two (s3://k:secret@a/x), 's3://k:secret@b/y?sig=secret'", "two (s3://***@a/x), 's3://***@b/y?sig=***'"),
    ("https://host/x#access_token=secret", "https://host/x#access_token=***"),
]
KEPT = [
    "hf://datasets/org/name@main/data/x.parquet",
    "abfs://container@account.dfs.core.windows.net/x",
    "http://host:8080/path@x",
    "s3://bucket/part-?.parquet",
    "s3://bucket/year=20?4/month=05/*.parquet",
    "a@b.c and key=value?x=y",
    "gs://bucket/[ab]*.jsonl",
]


@pytest.mark.parametrize(("text", "shown"), SHOWN)
def test_credentials_of_urls_are_hidden_and_nothing_else(text, shown):
    assert without_credentials(text) == shown == without_credentials(shown)
    assert "secret" not in one_line(text)


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_credential_is_shown(text):
    assert without_credentials(text) == text


def test_credentials_that_somebody_quotes_without_their_url_are_hidden():
    url = "s3://AKIA1234:abc/de+f@bucket/x.parquet?sig=topsecret"
    text = "Invalid bucket name 'AKIA1234:abc/de+f@bucket', key abc/de+f (topsecret)"
    assert without_credentials(text, url) == "Invalid bucket name '***@bucket', key *** (***)"


def test_a_message_that_is_cut_shows_no_piece_of_a_credential():
    for length in range(240, 300):
        assert "secret" not in one_line("x" * length + " s3://key:secretsecret@bucket/x")


@pytest.mark.parametrize("kind", [BatchgenError, InputError, TooManyFailed])
def test_no_error_shows_credentials(kind):
    assert str(kind("cannot read s3://key:secret@bucket/x")) == "cannot read s3://***@bucket/x"
