"""Formats of the tokens of well-known services, as published by the services, which are found in any text.

A pattern matches only a token's own characters, starts where no letter or digit is before it, and can fail only within
a bounded number of characters or at the end of a word. So a search takes time linear in the text.
"""

from __future__ import annotations

import re
from typing import Final

# Words and numbers with dashes between them are no token: sk-learn-2-pipelines-of-the-team.
_MIXED: Final = r"(?=[a-z\d_-]{0,60}+[A-Z])(?=[A-Za-z_-]{0,60}+\d)"

FORMATS: Final = {
    "JSON Web Token, and its like": r"eyJ(?<![\w-]...)[\w-]{5,}+\.[\w-]*+\.[\w-]{6,}+(?:\.[\w-]++)*+",
    "age": r"AGE-SECRET-KEY-1[A-Z0-9]{50,}+",
    "Aiven": r"AVNS_[\w-]{16,}+",
    "Airtable": r"pat[A-Za-z0-9]{14}\.[a-f0-9]{64}",
    "Alibaba Cloud": r"LTAI[A-Za-z0-9]{12,}+",
    "Amazon": r"A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}",
    "Anthropic, OpenAI and others": rf"sk-(?:[a-f0-9]{{32}}|{_MIXED}[\w-]{{20,}}+)",
    "Atlassian": r"AT(?:ATT|CTT)3[\w=-]{20,}+",
    "Brevo": r"xkeysib-[a-f0-9]{40,}+",
    "crates.io": r"cio[A-Za-z0-9]{32}",
    "Databricks": r"dapi[a-f0-9]{32}",
    "dbt": r"dbt[cu]_[\w=-]{20,}+",
    "DigitalOcean": r"do[opr]_v1_[a-f0-9]{40,}+",
    "Docker": r"dckr_[op]at_[\w-]{16,}+",
    "Doppler": r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9]{40,}+",
    "Figma": r"figd_[\w-]{20,}+",
    "GitHub": r"gh[opusr]_[A-Za-z0-9]{16,}+|github_pat_[A-Za-z0-9_]{16,}+",
    "GitLab": r"gl(?:pat|ptt|rt|dt|cbt|ft|soat|imt|agent|oas|ffct)-[\w-]{16,}+",
    "Google": r"AIza[\w-]{30,}+|GOCSPX-[\w-]{16,}+|ya29\.[\w-]{16,}+|1//0[\w-]{30,}+",
    "Grafana": r"gl(?:sa|c)_[\w+/=]{30,}+",
    "Groq": r"gsk_[A-Za-z0-9]{30,}+",
    "Heroku": r"HRKU-[\w-]{30,}+",
    "Hugging Face": r"hf_[A-Za-z0-9]{30,}+",
    "LangSmith": r"lsv2_[a-z]{2}_[a-f0-9]{20,}+[\w]*+",
    "Linear": r"lin_api_[A-Za-z0-9]{30,}+",
    "Mailgun": r"key-[a-f0-9]{32}",
    "Neon": r"npg_[A-Za-z0-9]{10,}+",
    "New Relic": r"NRAK-[A-Z0-9]{27}",
    "Notion": r"ntn_[A-Za-z0-9]{40,}+",
    "npm": r"npm_[A-Za-z0-9]{30,}+",
    "Perplexity": r"pplx-[A-Za-z0-9]{30,}+",
    "PlanetScale": r"pscale_(?:tkn|pw|oauth)_[\w.=-]{30,}+",
    "Postman": r"PMAK-[a-f0-9]{24}-[a-f0-9]{34}",
    "Prefect": r"pn[ub]_[A-Za-z0-9]{30,}+",
    "Pulumi": r"pul-[a-f0-9]{40}",
    "PyPI": rf"pypi-{_MIXED}[\w-]{{16,}}+",
    "Replicate": r"r8_[A-Za-z0-9]{30,}+",
    "RubyGems": r"rubygems_[a-f0-9]{40,}+",
    "SendGrid": r"SG\.[\w-]{16,}+\.[\w-]{16,}+",
    "Sentry": r"sntry[su]_[\w+/=.-]{20,}+",
    "Shopify": r"shp(?:at|ca|pa|ss|tka|ua)_[A-Fa-f0-9]{32}",
    "Slack": r"xox[a-z]-[A-Za-z0-9-]{10,}+|xapp-\d-[A-Za-z0-9-]{10,}+",
    "Square": r"sq0[a-z]{3}-[\w-]{22,}+",
    "Stripe": r"[rs]k_(?:live|test)_[A-Za-z0-9]{10,}+|whsec_[A-Za-z0-9+/]{16,}+",
    "Supabase": r"sbp_[a-f0-9]{40}|sb_secret_[\w-]{20,}+",
    "Tailscale": r"tskey-[\w-]{16,}+",
    "Telegram": r"(?:bot)?\d{8,10}:AA[\w-]{33}",
    "Tencent Cloud": r"AKID[A-Za-z0-9]{13,}+",
    "Terraform": r"atlasv1\.[\w=-]{40,}+",
    "Twilio": r"SK[a-f0-9]{32}",
    "Vault": r"hv[bsr]\.[\w-]{20,}+",
    "xAI": r"xai-[A-Za-z0-9]{40,}+",
    "webhooks": r"(?<=hooks\.slack\.com/)services/[\w/]{16,}+|(?<=discord\.com/api/)webhooks/\d{10,}+/[\w-]{30,}+",
    "Yandex Cloud": r"AQVN[\w-]{30,}+",
}
"""Issuers of tokens, each with the format of its tokens."""

# The first two checks fail at most places; they apply to all formats.
TOKEN: Final = re.compile(
    r"(?<![A-Za-z0-9])(?=[AGHLNPSabcdefghklnprstwxy\d][\w.:/-]{14})(?:" + "|".join(FORMATS.values()) + ")"
)
"""Pattern of a token in one of these formats."""

LEAST: Final = 15
"""Number of characters of the shortest token."""
