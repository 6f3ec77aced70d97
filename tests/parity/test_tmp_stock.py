import sys; sys.path.insert(0,"/work/main/tests/parity")
import pytest
from compare import trained, assert_bit_equal
from zeroshard.testing import on_ranks
@pytest.mark.parametrize("world",[2,3])
@pytest.mark.parametrize("name",["transformer","tied","experts"])
@pytest.mark.parametrize("stage",[0,1,2,3])
def test_stock(stage,name,world):
    on_ranks(world)(body)(stage,name,world)
def body(stage,name,world):
    a=trained(name,"bf16",1,stage=stage,world=world)
    assert_bit_equal(trained(name,"bf16",1,stage=stage,world=world,config={"transport":"stock"}),a)
