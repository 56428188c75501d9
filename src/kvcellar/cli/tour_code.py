"""The tour as a program; a test runs it."""

TEN_LINES = """\
import kvcellar as kv

model = kv.Model.from_gguf(kv.find_model("smollm2"))
ctx = model.context(n_ctx=256, n_seq_max=4)
a = ctx.sequence("Deep in the cellar, behind the oldest barrel,")
print(a.generate(40))
b, c, d = a.fork(), a.fork(), a.fork()    # every cell is shared, no byte copied
print(b.generate(36), d.generate(36, temperature=1.1, seed=4), sep="\\n")
print(c.generate(36, temperature=0.7, seed=2))
c.trim(24).append(" -- no. One night,")   # back 24 tokens, then on differently
print(c.generate(32), ctx.cache.view(), sep="\\n")    # who owns which cell
"""
