#!/usr/bin/env bash
# Makes tests/fixtures/tls: two authorities, and certificates of the first one for 127.0.0.1 and for another host. They are for tests
# only, so the key is public. Needs openssl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../tests/fixtures/tls"

openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out key.pem
for name in authority other; do
    openssl ecparam -name prime256v1 -genkey -noout -out "$name.key"
    openssl req -x509 -new -key "$name.key" -subj "/CN=$name of Plimsoll's tests" -days 36500 \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" -out "$name.pem"
done
for pair in server=IP:127.0.0.1 elsewhere=DNS:elsewhere.example; do
    name=${pair%%=*}
    openssl req -new -key key.pem -subj "/CN=$name" -out "$name.csr"
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "${pair#*=}" >"$name.ext"
    openssl x509 -req -in "$name.csr" -CA authority.pem -CAkey authority.key -days 36500 -extfile "$name.ext" -out "$name.pem"
done
rm -f ./*.key ./*.csr ./*.ext ./*.srl
