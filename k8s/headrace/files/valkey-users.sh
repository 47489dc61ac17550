#!/bin/sh
# users.sh RULES SECRETS OUT COMMAND...: write OUT, an ACL file, from RULES, in which PASSWORD-OF-role at the end of a line
# stands for the password that the file SECRETS/role holds, and run COMMAND. OUT holds the SHA-256 of the passwords; in no
# command line they appear at all.
set -eu
rules=$1 secrets=$2 out=$3
shift 3
umask 077
while IFS= read -r line; do
  case $line in
    *PASSWORD-OF-*)
      role=${line##*PASSWORD-OF-}
      if [ ! -s "$secrets/$role" ]; then
        echo "error: the Secret of the passwords has no key '$role', or an empty one; see headrace k8s secret" >&2
        exit 2
      fi
      hash=$(tr -d '\r\n' < "$secrets/$role" | sha256sum)
      line="${line%PASSWORD-OF-*}#${hash%% *}"
      ;;
  esac
  printf '%s\n' "$line"
done < "$rules" > "$out"
exec "$@"
