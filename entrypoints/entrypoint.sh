#!/usr/bin/env bash
# What both images run. A mode of Wherry goes to its own script where something must be set before Python starts,
# otherwise straight to Python; any other command is run as it is:
#
#   entrypoint.sh train recipes/demo.yaml      entrypoint.sh wherry --help      entrypoint.sh bash
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

main() {
  local -r word=${1:---help}
  # shellcheck source=entrypoints/environment.sh
  source "${here}/environment.sh"
  case ${word} in
    doctor | train | merge | serve | eval)
      shift
      exec "${here}/${word}.sh" "$@"
      ;;
    wherry)
      shift
      main "$@"
      ;;
    prepare | plan | explain | wait | status | report | version | -*) exec "${wherry[@]}" "$@" ;;
    *)
      if type -P "${word}" >/dev/null; then exec "$@"; fi
      exec "${wherry[@]}" "$@" # no such command either: Python names the nearest mode
      ;;
  esac
}

main "$@"
