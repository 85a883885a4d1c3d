"""The paper's settings through the real TPU compiler, without a TPU: they fit, and nothing large is gathered or held."""

import pytest

from tests.helpers.for_devices import compiled, look

# The smallest settings that the README gives. Two layers show what all do, in minutes of a core;
# .ci/by-hand.txt names the cases that CI leaves out.
CASES = [
    ("1.5b", "v5e:2x4", "fsdp=8", "prefill,decode,update", 2), ("1.5b", "v5e:2x4", "fsdp=8", "update", 28),
    ("7b", "v5e:4x4", "fsdp=8,tensor=2", "update", 28),
    pytest.param("1.5b", "v5e:2x4", "fsdp=8", "rollout", 28, marks=pytest.mark.needs("data")),
]  # fmt: skip
CHIP = {"v5e": 16, "v5p": 95, "v6e": 32}  # GiB


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.needs("libtpu")
@pytest.mark.parametrize(("size", "topology", "mesh", "programs", "layers"), CASES)
def test_the_papers_settings_compile_and_fit(size, topology, mesh, programs, layers):
    for program, found in compiled(f"alfworld_qwen2.5_{size}", topology, mesh, programs, layers).items():
        assert found["bytes"] < 0.92 * CHIP[topology.partition(":")[0]] * 2**30, program
        assert found["stacks gathered"] == [], program
        assert found["vocabularies held"] == [], program
        assert found["tables widened"] == [] or program == "update"  # whose parameters are float32
        assert (found["splash"] > 0) == (program != "decode"), program  # splash attention
        assert found["padded"] == [] or program != "decode"
        assert not found["calls of the host"], program


def test_what_must_not_be_there_is_seen():
    sizes = {"layers": 28, "vocabulary": 1024, "parts": 8, "width": 64, "tokens": 4096}
    found = look("%a = bf16[27,64,512] all-gather(%b)\n%c = f32[4096,128] dot(%d)\n%e = bf16[64,1024] f(%g)", **sizes)
    assert {name: what for name, what in found.items() if what} == {
        "stacks gathered": ["27,64,512"], "vocabularies held": ["4096,128"],
    }  # fmt: skip
    assert look('custom_call_target="__cudnn$fmhaSoftmax"', **sizes)["cudnn"] == 1
    assert look("%a = f32[128,64] convert(%b)", **sizes)["tables widened"] == ["128,64"]
    cache = "%%a = (bf16[16,2,64,1536]{%s:T(8,128)(2,1)}) while(%%b)"
    assert look(cache % "2,1,3,0", **sizes)["padded"] == ["bf16[16,2,64,1536]{2,1,"]  # if not written head by head
    assert look(cache % "2,3,1,0", **sizes)["padded"] == []
    assert look("%a = bf16[64,512] all-gather(%b)\n%c = f32[440,128] dot(%d)", **sizes)["vocabularies held"] == []
