"""Requests that every listener refuses."""

from rollweave.io.http.guard import JSON

ATTACKS = [
    ("POST", {"Content-Type": "text/plain"}, 415),
    ("POST", {"Content-Type": "application/x-www-form-urlencoded", "Origin": "http://evil"}, 403),
    ("POST", {"Content-Type": "multipart/form-data; boundary=x", "Origin": "null"}, 403),
    ("POST", {"Content-Type": JSON, "Origin": "http://evil"}, 403),
    ("POST", {"Content-Type": JSON, "Host": "evil.com"}, 421),
    ("POST", {"Content-Type": JSON, "Host": "evil.com", "Origin": "http://evil.com"}, 421),
    ("OPTIONS", {"Origin": "http://evil", "Access-Control-Request-Method": "POST"}, 403),
    ("DELETE", {"Origin": "http://evil"}, 403),
    ("GET", {"Sec-Fetch-Site": "cross-site"}, 403),
    ("GET", {"Host": "evil.com", "Connection": "Upgrade", "Upgrade": "websocket"}, 421),
]
