"""aider against a running Plimsoll server: python3 aider_client.py URL

aider asks for an edit, reads the streamed answer and changes the file. The small model cannot edit, so its answer is held to a
pattern: the request, the stream and the edit are aider's own.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

url = sys.argv[1]
EDIT = r"greeting\.py\n```\nprint\('hello world'\)\n```\n"

with tempfile.TemporaryDirectory() as folder:
    work = pathlib.Path(folder)
    # JSON is YAML.
    settings = [
        {
            "name": "openai/smollm2",
            "edit_format": "whole",
            "use_repo_map": False,
            "extra_params": {"max_tokens": 200, "extra_body": {"guided_regex": EDIT}},
        }
    ]
    (work / "settings.yml").write_text(json.dumps(settings))
    (work / "greeting.py").write_text("print('hi')\n")
    environment = os.environ | {
        "HOME": folder,
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": "unused",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    flags = "--no-git --yes-always --no-check-update --no-show-model-warnings --analytics-disable --no-show-release-notes --no-pretty"
    command = [sys.executable, "-m", "aider", "--model", "openai/smollm2", "--model-settings-file", "settings.yml", *flags.split()]
    command += ["--message", "Make it say hello to the world.", "greeting.py"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    edited = (work / "greeting.py").read_text()
    assert done.returncode == 0 and edited == "print('hello world')\n", f"{edited!r}\n{done.stdout}\n{done.stderr}"
    print("ok aider edits a file")
print("all good")
