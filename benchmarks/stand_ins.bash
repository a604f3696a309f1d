# What public_commands.py has each bash read first (BASH_ENV): the script runs, the programs that it calls do not.
# PATH holds stand-ins and a few text tools. Any other program is recorded with its arguments, and does nothing.

stand_ins_record() {
  local file
  file=$(mktemp "$STAND_INS_CALLS/$EPOCHREALTIME.XXXXXX") && printf '%s\0' "$@" >"$file"
}

stand_ins_inside() { # whether a path lies in the throw-away folder
  [[ "$(realpath -m -- "$1")/" == "$STAND_INS_ROOT"/* ]]
}

# Before each command: PATH is set back, and a program that is named by its absolute path gets a stand-in too.
stand_ins_before() {
  local word=${1%%[[:space:]]*}
  PATH=$STAND_INS_PATH
  [[ "$word" =~ ^\"?\$\{?([A-Za-z_][A-Za-z_0-9]*)\}?\"?$ ]] && word=${!BASH_REMATCH[1]-}
  [[ "$word" =~ ^/[A-Za-z0-9_./+-]+$ ]] && eval "function $word { stand_ins_record $word \"\$@\"; }"
  return 0
}

command_not_found_handle() { stand_ins_record "$@"; }
cd() { # a folder that is missing or lies elsewhere is passed over
  [[ $# -gt 0 && -d "${*: -1}" ]] && stand_ins_inside "${*: -1}" && builtin cd "${@: -1}"
  return 0
}
source() {
  [[ -f "$1" ]] && stand_ins_inside "$1" || return 0
  builtin source "$@"
}
mkdir() {
  local folder
  for folder in "$@"; do
    [[ "$folder" == -* ]] || ! stand_ins_inside "$folder" || "$STAND_INS_MKDIR" -p -- "$folder"
  done
  return 0
}
exec() { [[ $# -eq 0 ]] || { stand_ins_before "$1"; "$@"; exit; }; }
which() { type -P "$@"; }
tee() { cat; }
kill() { :; }
ulimit() { :; }
pushd() { cd "$@"; }
popd() { :; }
function . { source "$@"; }

set -o functrace
trap 'stand_ins_before "$BASH_COMMAND"' DEBUG
