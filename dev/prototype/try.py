import sys; sys.path.insert(0, str(__import__("pathlib").Path(__file__).parent))
import torch, torch.nn.functional as F, warnings, traceback
warnings.simplefilter("ignore")
from transformers import *
from transformers.utils import logging; logging.set_verbosity_error()
from capture import per_sample
N=5
def ref(model, loss_fn, batch, n):
    ps={k:p for k,p in model.named_parameters() if p.requires_grad}
    rows=[]
    for i in range(n):
        one={k:v[i:i+1] for k,v in batch.items()}
        gs=torch.autograd.grad(loss_fn(model,one).sum(), list(ps.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g,p in zip(gs,ps.values())])
    return {k:torch.stack([r[j] for r in rows]) for j,k in enumerate(ps)}
def cls(model,b): return F.cross_entropy(model(**{k:v for k,v in b.items() if k!="y"}).logits.float(), b["y"], reduction="none")
def lm(model,b):
    lo=model(**b).logits; return F.cross_entropy(lo[:,:-1].mT, b["input_ids"][:,1:], reduction="none").mean(1)
def s2s(model,b):
    lo=model(input_ids=b["input_ids"], decoder_input_ids=b["dec"]).logits; return F.cross_entropy(lo[:,:-1].mT, b["dec"][:,1:], reduction="none").mean(1)
ids=lambda T=7: {"input_ids":torch.randint(3,50,(N,T))}
idm=lambda T=7: {"input_ids":torch.randint(3,50,(N,T)),"attention_mask":torch.ones(N,T,dtype=torch.long)}
y=lambda b: b|{"y":torch.randint(2,(N,))}
small=dict(vocab_size=50,hidden_size=16,num_hidden_layers=2,num_attention_heads=2,intermediate_size=24,max_position_embeddings=32)
px=lambda s=32,c=3: {"pixel_values":torch.randn(N,c,s,s)}
M={
 "bert": lambda: (BertForSequenceClassification(BertConfig(**small)),cls,y(idm())),
 "roberta-mlm": lambda: (RobertaForMaskedLM(RobertaConfig(**small)),lm,idm()),
 "bert-mlm": lambda: (BertForMaskedLM(BertConfig(**small)),lm,idm()),
 "gpt2": lambda: (GPT2LMHeadModel(GPT2Config(vocab_size=50,n_embd=16,n_layer=2,n_head=2,n_positions=32)),lm,ids()),
 "llama": lambda: (LlamaForCausalLM(LlamaConfig(**small,num_key_value_heads=1)),lm,idm()),
 "gemma2": lambda: (Gemma2ForCausalLM(Gemma2Config(**small,num_key_value_heads=1,head_dim=8)),lm,idm()),
 "gemma3": lambda: (Gemma3ForCausalLM(Gemma3TextConfig(**small,num_key_value_heads=1,head_dim=8)),lm,idm()),
 "t5": lambda: (T5ForConditionalGeneration(T5Config(vocab_size=50,d_model=16,d_kv=8,d_ff=24,num_layers=2,num_heads=2)),s2s,ids()|{"dec":torch.randint(3,50,(N,6))}),
 "bart": lambda: (BartForConditionalGeneration(BartConfig(vocab_size=50,d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2,encoder_ffn_dim=24,decoder_ffn_dim=24,max_position_embeddings=32)),s2s,ids()|{"dec":torch.randint(3,50,(N,6))}),
 "deberta": lambda: (DebertaV2ForSequenceClassification(DebertaV2Config(**small,relative_attention=True,pos_att_type=["p2c","c2p"],position_buckets=8)),cls,y(idm())),
 "mpnet": lambda: (MPNetForSequenceClassification(MPNetConfig(**small)),cls,y(idm())),
 "swin": lambda: (SwinForImageClassification(SwinConfig(image_size=32,patch_size=4,embed_dim=8,depths=[2,2],num_heads=[2,2],window_size=4)),cls,y(px())),
 "vit": lambda: (ViTForImageClassification(ViTConfig(hidden_size=16,num_hidden_layers=2,num_attention_heads=2,intermediate_size=24,image_size=32,patch_size=8)),cls,y(px())),
 "convnext": lambda: (ConvNextForImageClassification(ConvNextConfig(depths=[1,1],hidden_sizes=[8,16],num_stages=2)),cls,y(px())),
 "mixtral": lambda: (MixtralForCausalLM(MixtralConfig(**small,num_key_value_heads=1,num_local_experts=4)),lm,idm()),
 "mamba": lambda: (MambaForCausalLM(MambaConfig(vocab_size=50,hidden_size=16,num_hidden_layers=2,state_size=4)),lm,ids()),
 "wav2vec2": lambda: (Wav2Vec2ForSequenceClassification(Wav2Vec2Config(hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=24,conv_dim=(8,8),conv_stride=(5,2),conv_kernel=(10,3),num_conv_pos_embeddings=8,num_conv_pos_embedding_groups=2,vocab_size=12)),cls,y({"input_values":torch.randn(N,400)})),
 "albert": lambda: (AlbertForSequenceClassification(AlbertConfig(**small,embedding_size=8)),cls,y(idm())),
 "distilbert": lambda: (DistilBertForSequenceClassification(DistilBertConfig(vocab_size=50,dim=16,n_layers=2,n_heads=2,hidden_dim=24,max_position_embeddings=32)),cls,y(idm())),
 "electra": lambda: (ElectraForSequenceClassification(ElectraConfig(**small)),cls,y(idm())),
 "opt": lambda: (OPTForCausalLM(OPTConfig(vocab_size=50,hidden_size=16,num_hidden_layers=2,num_attention_heads=2,ffn_dim=24,max_position_embeddings=32,word_embed_proj_dim=16)),lm,idm()),
 "qwen2": lambda: (Qwen2ForCausalLM(Qwen2Config(**small,num_key_value_heads=1)),lm,idm()),
 "phi": lambda: (PhiForCausalLM(PhiConfig(**small)),lm,idm()),
 "bloom": lambda: (BloomForCausalLM(BloomConfig(vocab_size=50,hidden_size=16,n_layer=2,n_head=2)),lm,idm()),
}
which=sys.argv[1:] or list(M)
for name in which:
    torch.manual_seed(0)
    try:
        model,loss,batch=M[name]()
        model=model.double().eval(); batch={k:v.double() if v.is_floating_point() else v for k,v in batch.items()}
        want=ref(model,loss,batch,N)
        got,mode=per_sample(model,loss,batch,N)
        worst=0; bad=None
        for k,v in want.items():
            g=got.get(k); d=float((v if g is None else v-g).norm()/(v.norm()+1e-12)) if float(v.norm())>1e-12 else float(0 if g is None else g.norm())
            if d>worst: worst,bad=d,k
        print(f"{name:12} worst {worst:.1e} {bad}  uses {len(mode.uses)}", flush=True)
    except Exception as e:
        print(f"{name:12} {type(e).__name__}: {str(e)[:150]}", flush=True)
        if len(which)==1: traceback.print_exc()
